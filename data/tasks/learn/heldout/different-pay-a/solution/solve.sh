tail -n +2 a.csv | cut -d, -f2 | sort -u | wc -l > answer.txt
