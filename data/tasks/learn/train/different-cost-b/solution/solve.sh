jq 'map(.cost) | unique | length' b.json > answer.txt
