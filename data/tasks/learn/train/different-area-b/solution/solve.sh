jq 'map(.area) | unique | length' b.json > answer.txt
