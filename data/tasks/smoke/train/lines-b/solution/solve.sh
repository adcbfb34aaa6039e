wc -l < b.csv > answer.txt
