jq 'map(.pay) | add' b.json > answer.txt
