wc -l < c.csv > answer.txt
