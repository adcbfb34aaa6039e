tail -n +2 a.csv | cut -d, -f6 | sort -n | head -1 > answer.txt
