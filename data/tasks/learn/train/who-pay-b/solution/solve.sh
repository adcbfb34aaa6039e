jq -r 'max_by(.pay) | .name' b.json > answer.txt
