cut -d, -f2 b.csv | sort -n | head -1 > answer.txt
