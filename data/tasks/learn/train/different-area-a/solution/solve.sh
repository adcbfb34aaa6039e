tail -n +2 a.csv | cut -d, -f6 | sort -u | wc -l > answer.txt
