jq 'map(.area) | add' b.json > answer.txt
