jq 'map(.cost) | add' b.json > answer.txt
