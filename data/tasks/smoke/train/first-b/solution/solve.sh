cut -d, -f1 b.csv | head -1 > answer.txt
