cut -d, -f2 b.csv | sort -n | tail -1 > answer.txt
