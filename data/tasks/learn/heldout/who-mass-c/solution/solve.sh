sqlite3 c.db 'select name from t order by mass desc limit 1' > answer.txt
