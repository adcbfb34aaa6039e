jq -r 'max_by(.size) | .name' b.json > answer.txt
