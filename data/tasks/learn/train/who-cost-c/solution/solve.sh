sqlite3 c.db 'select name from t order by cost desc limit 1' > answer.txt
