jq 'map(.size) | max' b.json > answer.txt
