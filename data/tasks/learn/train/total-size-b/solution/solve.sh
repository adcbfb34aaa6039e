jq 'map(.size) | add' b.json > answer.txt
