cut -d, -f1 a.csv | head -1 > answer.txt
