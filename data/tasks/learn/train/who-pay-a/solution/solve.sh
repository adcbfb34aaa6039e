tail -n +2 a.csv | sort -t, -k2,2n | tail -1 | cut -d, -f1 > answer.txt
