jq 'map(.cost) | min' b.json > answer.txt
