jq 'map(.mass) | max' b.json > answer.txt
