tail -n +2 a.csv | cut -d, -f4 | sort -u | wc -l > answer.txt
