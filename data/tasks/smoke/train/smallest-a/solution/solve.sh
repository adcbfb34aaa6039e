cut -d, -f2 a.csv | sort -n | head -1 > answer.txt
