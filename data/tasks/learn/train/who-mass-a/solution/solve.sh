tail -n +2 a.csv | sort -t, -k5,5n | tail -1 | cut -d, -f1 > answer.txt
