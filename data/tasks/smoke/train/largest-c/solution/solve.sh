cut -d, -f2 c.csv | sort -n | tail -1 > answer.txt
