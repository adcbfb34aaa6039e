jq 'map(.mass) | min' b.json > answer.txt
