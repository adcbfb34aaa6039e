jq 'map(.size) | unique | length' b.json > answer.txt
