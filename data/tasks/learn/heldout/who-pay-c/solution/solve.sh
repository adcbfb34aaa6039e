sqlite3 c.db 'select name from t order by pay desc limit 1' > answer.txt
