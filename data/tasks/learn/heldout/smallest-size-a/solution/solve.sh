tail -n +2 a.csv | cut -d, -f4 | sort -n | head -1 > answer.txt
