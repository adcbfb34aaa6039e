cut -d, -f2 a.csv | sort -n | tail -1 > answer.txt
