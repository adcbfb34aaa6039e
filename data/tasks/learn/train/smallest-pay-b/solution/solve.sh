jq 'map(.pay) | min' b.json > answer.txt
