jq 'map(.area) | max' b.json > answer.txt
