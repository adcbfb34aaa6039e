tail -n +2 a.csv | cut -d, -f6 | sort -n | tail -1 > answer.txt
