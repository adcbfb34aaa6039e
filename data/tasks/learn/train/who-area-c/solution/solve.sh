sqlite3 c.db 'select name from t order by area desc limit 1' > answer.txt
