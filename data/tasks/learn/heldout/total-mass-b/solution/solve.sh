jq 'map(.mass) | add' b.json > answer.txt
