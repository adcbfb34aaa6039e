tail -n +2 a.csv | sort -t, -k4,4n | tail -1 | cut -d, -f1 > answer.txt
