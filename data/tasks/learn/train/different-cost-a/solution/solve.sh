tail -n +2 a.csv | cut -d, -f3 | sort -u | wc -l > answer.txt
