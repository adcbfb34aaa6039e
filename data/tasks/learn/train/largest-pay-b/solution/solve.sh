jq 'map(.pay) | max' b.json > answer.txt
