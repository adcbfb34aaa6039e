jq -r 'max_by(.mass) | .name' b.json > answer.txt
