jq 'map(.cost) | max' b.json > answer.txt
