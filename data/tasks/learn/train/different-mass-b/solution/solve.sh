jq 'map(.mass) | unique | length' b.json > answer.txt
