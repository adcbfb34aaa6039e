tail -n +2 a.csv | cut -d, -f3 | sort -n | tail -1 > answer.txt
