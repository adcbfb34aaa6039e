sqlite3 c.db 'select name from t order by size desc limit 1' > answer.txt
