cut -d, -f1 c.csv | head -1 > answer.txt
