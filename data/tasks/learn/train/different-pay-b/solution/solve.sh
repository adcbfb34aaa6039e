jq 'map(.pay) | unique | length' b.json > answer.txt
