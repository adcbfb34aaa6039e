tail -n +2 a.csv | cut -d, -f5 | sort -u | wc -l > answer.txt
