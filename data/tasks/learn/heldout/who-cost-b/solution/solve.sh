jq -r 'max_by(.cost) | .name' b.json > answer.txt
