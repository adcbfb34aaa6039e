jq 'map(.area) | min' b.json > answer.txt
