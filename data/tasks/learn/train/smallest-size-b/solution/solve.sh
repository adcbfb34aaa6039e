jq 'map(.size) | min' b.json > answer.txt
