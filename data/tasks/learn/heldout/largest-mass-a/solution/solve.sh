tail -n +2 a.csv | cut -d, -f5 | sort -n | tail -1 > answer.txt
