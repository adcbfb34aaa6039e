tail -n +2 a.csv | cut -d, -f3 | sort -n | head -1 > answer.txt
