jq -r 'max_by(.area) | .name' b.json > answer.txt
