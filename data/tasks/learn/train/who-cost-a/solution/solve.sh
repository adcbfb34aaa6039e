tail -n +2 a.csv | sort -t, -k3,3n | tail -1 | cut -d, -f1 > answer.txt
