tail -n +2 a.csv | sort -t, -k6,6n | tail -1 | cut -d, -f1 > answer.txt
