cut -d, -f2 c.csv | sort -n | head -1 > answer.txt
